"""Delta saves: chunks that an earlier checkpoint has are not written again; the save refers to them."""
