"""Fuzzes the importer of one format, in a process of its own: python fuzz_importer.py SOURCE WORK OPTIONS...

SOURCE   a small checkpoint, of which one file after another is replaced; for a file of torch.save, its pickle
WORK     a directory: corpus/ has the inputs of earlier runs, from which this one continues; finds/ the failing inputs
OPTIONS  libFuzzer's: -max_total_time=5 and others

An input may be read, or refused by one of our errors. Anything else, a hang, or memory beyond the limit, ends the
process with another status than 0.
"""

from __future__ import annotations

import resource
import shutil
import sys
import zipfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["flowstone.convert", "flowstone.format", "zipfile", "pickletools"]):
    import flowstone as fs
    from flowstone.convert import importing  # noqa: F401
    from flowstone.convert.opening import open_source

TIMEOUT_S = 20
MEMORY_MIB = 2048
_INPUT_BYTES_MAX = 1 << 16
_COPIED_BYTES_MAX = 1 << 20  # only what is small is imported, too, and not only looked at


def files_of(source: Path) -> list[Path]:
    return [source] if source.is_file() else sorted(path for path in source.rglob("*") if path.is_file())


def content_of(path: Path) -> bytes:
    """What is changed of a file: of an archive, its pickle."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as opened:
            for name in opened.namelist():
                if name.endswith("/data.pkl"):
                    return opened.read(name)
    return path.read_bytes()


def put(path: Path, original: Path, content: bytes) -> None:
    """Give a file that content; of an archive, its pickle."""
    if not zipfile.is_zipfile(original):
        path.write_bytes(content)
        return
    with zipfile.ZipFile(original) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            new.writestr(name, content if name.endswith("/data.pkl") else old.read(name))


def seeds(source: Path, corpus: Path) -> None:
    for number, path in enumerate(files_of(source)):
        (corpus / f"seed-{number}").write_bytes(bytes([number]) + content_of(path)[:_INPUT_BYTES_MAX])


class _Target:
    def __init__(self, source: Path, place: Path) -> None:
        self._source, self._files, self._place = source, files_of(source), place
        self._copied = self._place / source.name
        shutil.copytree(source, self._copied) if source.is_dir() else shutil.copy(source, self._copied)

    def try_input(self, data: bytes) -> None:
        if not data:
            return
        original = self._files[data[0] % len(self._files)]
        changed = self._copied if self._source.is_file() else self._copied / original.relative_to(self._source)
        put(changed, original, data[1:])
        try:
            opened = open_source(self._copied)
            if sum(tensor.bytes for tensor in opened.tensors) <= _COPIED_BYTES_MAX:
                fs.import_checkpoint(self._copied, self._place / "run", rules=fs.Skip("odd*"), budget_bytes=32 << 20)
        except fs.FlowstoneError:
            pass
        finally:
            shutil.rmtree(self._place / "run", ignore_errors=True)
            shutil.copy(original, changed)


def main() -> None:
    source, work, *options = sys.argv[1:]
    for name in ("corpus", "finds"):
        (Path(work) / name).mkdir(parents=True, exist_ok=True)
    seeds(Path(source), Path(work) / "corpus")
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    place = Path(work) / "place"  # of the last run, which libFuzzer has ended without a word to Python
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir()
    target = _Target(Path(source), place)
    atheris.Setup([
        sys.argv[0], f"-timeout={TIMEOUT_S}", f"-rss_limit_mb={MEMORY_MIB}", f"-max_len={_INPUT_BYTES_MAX}",
        f"-artifact_prefix={work}/finds/", "-print_final_stats=1", *options, f"{work}/corpus",
    ], target.try_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
