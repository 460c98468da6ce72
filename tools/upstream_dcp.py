"""Run torch's own tests of DCP with Flowstone: two class names are replaced, and nothing else in the tests.

    python tools/upstream_dcp.py FOLDER [--torch] [FILE ...] [pytest's arguments]

FOLDER   for downloaded and written files; kept for the next run
--torch  use torch's own classes, to see which tests fail here without Flowstone, too
FILE     some of FILES, instead of all

The tests are those of torch 2.6, from Debian 13's source package (27 MB, by apt-get); none of them is in this
repository. Most need GPUs, and are skipped without. So all are run twice: unchanged, and with the processor instead of
the GPUs, where that is possible. Each run ends with the numbers of passed, skipped and failed tests of each file. Slow
ranks leave their stacks in FOLDER/late, long before torch's tests kill them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

import late_ranks

TESTS = "test/distributed/checkpoint"
FILES = (
    "test_file_system_checkpoint_cpu.py", "test_file_system_checkpoint.py", "test_compatibility.py",
    "test_dtensor_checkpoint.py", "test_dtensor_resharding.py", "test_fsdp_model_state.py", "test_fsdp_optim_state.py",
    "test_hsdp_checkpoint.py", "test_tp_checkpoint.py", "test_fsdp_tp_checkpoint_conversion.py",
    "e2e/test_e2e_save_and_load.py", "e2e/test_fine_tuning.py", "e2e/test_fsdp_ep.py", "e2e/test_pipeline.py",
)
"""Files that use a FileSystemWriter or FileSystemReader."""
WITH_GPUS_ALONE = (
    "test_fsdp_model_state.py", "test_fsdp_optim_state.py", "test_hsdp_checkpoint.py",
    "test_fsdp_tp_checkpoint_conversion.py", "e2e/test_fine_tuning.py", "e2e/test_fsdp_ep.py",
)
"""Tests of FSDP 1, which later versions of torch refuse to create on a processor."""
AS_MANY_AS_GPUS = ("e2e/test_fine_tuning.py", "e2e/test_pipeline.py", "e2e/test_fsdp_ep.py")
"""Tests with as many ranks as there are GPUs: without GPUs they would pass without doing anything."""
_FSDP_1 = "FSDP 1 on a processor, which torch refuses"
KNOWN = {
    "test_overwrite": "torch's own writer fills the directory first: one that holds something else is refused",
    "test_e2e_async_cached_cache_staged_state_dict_False": _FSDP_1,
    "test_e2e_async_cached_cache_staged_state_dict_True": _FSDP_1,
    "test_e2e_compile_False_model_type0": _FSDP_1,
    "test_e2e_compile_False_model_type1": _FSDP_1,
    "test_e2e_compile_True_model_type0": _FSDP_1,
    "test_e2e_compile_True_model_type1": _FSDP_1,
    "test_partial_load": _FSDP_1,
}
"""Tests that fail, and the reason why that is accepted."""
CLASSES = {"FileSystemWriter": "FlowstoneWriter", "FileSystemReader": "FlowstoneReader"}
LATE_S = 150
"""The age at which a rank's stacks are written."""
GIVEN_UP_S = 1200
"""The age at which torch kills a test's ranks; 300 by default. The clock continues while a machine is suspended."""
IMPORT = "from flowstone.adapters.dcp import FlowstoneReader, FlowstoneWriter\n"
ON_CPUS = (
    (r"^ *@(skip_if_lt_x_gpu|requires_nccl)\(.*\)\n", ""), (r"\.cuda\((dist\.get_rank\(\)|[^()]*)\)", ""),
    (r"torch\.cuda\.device_count\(\)", "4"), (r"cpu:gloo,cuda:nccl", "gloo"), (r"rank:(\d)/cuda:\d", r"rank:\1/cpu"),
    (r", device='cuda:0'", ""), (r"cuda:\d", "cpu"), (r"device(=|\()\"cuda\"", r'device\1"cpu"'),
)
"""Lines and words about GPUs, and their replacements."""
SOURCES = """Types: deb-src
URIs: {mirror}
Suites: trixie
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


def mirror() -> str:
    """The package sources of this machine's Debian, where the sources are, too."""
    asked = ["apt-get", "indextargets", "--format", "$(LABEL) $(REPO_URI)"]
    targets = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.splitlines()
    address = [address for label, _, address in (target.partition(" ") for target in targets) if label == "Debian"]
    if not address:
        sys.exit("upstream_dcp.py: apt-get knows no packages of Debian; run `apt-get update` first")
    return address[0]


def fetch(folder: Path) -> Path:
    """The folder of torch's tests, as Debian has them."""
    folders = list(folder.glob(f"pytorch-*/{TESTS}"))
    if folders:
        return folders[0]
    lists = folder / "apt"
    (lists / "partial").mkdir(parents=True, exist_ok=True)
    (folder / "debian.sources").write_text(SOURCES.format(mirror=mirror()))
    places = {"Etc::sourcelist": folder / "debian.sources", "Etc::sourceparts": "/dev/null", "State::lists": lists}
    apt = ["apt-get", "-qq", *(f"-oDir::{name}={path}" for name, path in places.items())]
    subprocess.run([*apt, "update"], check=True)
    subprocess.run([*apt, "source", "--download-only", "pytorch"], check=True, cwd=folder)
    with tarfile.open(next(folder.glob("pytorch_*.orig.tar.xz"))) as archive:
        members = [member for member in archive if f"/{TESTS}/" in member.name and member.isfile()]
        archive.extractall(folder, members, filter="data")
    return fetch(folder)


def exchanged(text: str, *, classes: bool, on_cpus: bool) -> str:
    """A test file with the replaced classes and the replaced device."""
    if classes:
        names = "|".join(CLASSES)
        text = re.sub(
            r"^from torch[\w.]* import (\([^)]*\)|.*)$", lambda match: re.sub(rf"\b({names}),?\s*", "", match[0]), text,
            flags=re.MULTILINE,
        )
        text = re.sub(r"^from torch[\w.]* import (\(\s*\)|\s*)$", "", text, flags=re.MULTILINE)
        text = re.sub(rf"\b(?:[\w]+\.)*({names})\b", lambda match: CLASSES[match[1]], text)
        text = IMPORT + text
    for pattern, other in ON_CPUS if on_cpus else ():
        text = re.sub(pattern, other, text, flags=re.MULTILINE)
    return text


def outcomes(report: Path) -> list[str]:
    """The numbers in pytest's report for each file."""
    counts: dict[str, Counter[str]] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  # pytest has just written it
        parts = case.get("classname", "").split(".")
        module = ".".join(part for part in parts if part.islower())  # classes have capital letters
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        counts.setdefault(module, Counter())[min(kinds, default="passed")] += 1
    return [
        f"{module}: {count['passed']} passed, {count['skipped']} skipped, {count['failure'] + count['error']} failed"
        for module, count in counts.items()
    ]


def failures(report: Path) -> dict[str, str]:
    """The names of the failed tests with their known reasons; "" for any other, such as a late rank."""
    failures = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314  # pytest has just written it
        messages = [child.get("message", "") for child in case if child.tag in ("failure", "error")]
        if messages:
            name = case.get("name", "")
            failures[name] = "" if any("timed out" in message for message in messages) else KNOWN.get(name, "")
    return failures


def run(place: Path, source: Path, name: str, files: Sequence[str], options: Sequence[str]) -> bool:
    """Run files in the mode `name`; returns whether only known tests failed. Leaves a report beside them."""
    classes, on_cpus = not name.startswith("torch"), name.endswith("on-cpus")
    print(f"== {name}", flush=True)
    for file in files:
        target = place / name / file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(exchanged((source / file).read_text(), classes=classes, on_cpus=on_cpus))
    (place / "pytest.ini").write_text("[pytest]\n")  # otherwise the settings of this repository's tests would apply
    report = place / f"{name}.xml"
    report.unlink(missing_ok=True)
    late = place / "late" / name
    environment = {**late_ranks.environment(late, LATE_S), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] += os.pathsep + str(place / "packages")
    environment["DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"] = str(GIVEN_UP_S)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-rfEs", "--tb=short", *files]
    command += [f"--junitxml={report}", *options]
    with late_ranks.watched(late, LATE_S):
        ended = subprocess.run(command, cwd=place / name, env=environment, check=False).returncode
    for path in late_ranks.told(late):
        print(f"a rank took more than {LATE_S} s: {path}", flush=True)
    if not report.exists():
        print("pytest has left no report", flush=True)
        return False
    failed = failures(report)
    known = [f"{key}: known to fail: {why}" for key, why in failed.items() if why]
    print(*outcomes(report), *known, sep="\n", flush=True)
    return ended in (0, 5) or (ended == 1 and all(failed.values()))  # 5: there were no tests to run


def main() -> None:
    arguments = sys.argv[1:]
    classes = "torch" if "--torch" in arguments else "flowstone"
    folder, *rest = [argument for argument in arguments if argument != "--torch"]
    files, options = [word for word in rest if word in FILES], [word for word in rest if word not in FILES]
    place = Path(folder).resolve()
    source, packages = fetch(place), place / "packages"
    if not packages.exists():  # packages that torch's tests need and Flowstone's do not
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(packages)]
        subprocess.run([*pip, "expecttest"], check=True)
    names = [f"{classes}-{how}" for how in ("as-they-are", "on-cpus")]
    expected = files or FILES
    without_gpus = () if list(Path("/dev").glob("nvidia[0-9]*")) else AS_MANY_AS_GPUS
    chosen = [[file for file in expected if file not in left_out] for left_out in (without_gpus, WITH_GPUS_ALONE)]
    sound = [run(place, source, name, some, options) for name, some in zip(names, chosen, strict=True) if some]
    sys.exit(0 if all(sound) else 1)


if __name__ == "__main__":
    main()
