"""The formats that can be written. Each has a module, which plans the layout of its files before the copy starts."""
