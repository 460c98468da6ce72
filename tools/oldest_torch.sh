#!/bin/sh
# Test the wheel beside the oldest torch that is supported: 2.6, which Debian 13 has, for Python 3.13, without CUDA.
#
#   tools/oldest_torch.sh DIST ROOT [pytest's arguments]
#
# DIST   the folder of wheels; the stable ABI's is taken
# ROOT   a folder for a bare Debian 13 (1.5 GB), made if it is not there: no compiler, no make; kept for the next time
#
# Needs root, for debootstrap, chroot and namespaces. What runs inside has no network.
set -eu
dist=$1 root=$2
shift 2
[ "$(id -u)" = 0 ] || { echo "oldest_torch.sh: debootstrap and chroot need root" >&2; exit 1; }
here=$(cd "$(dirname "$0")/.." && pwd)
sh "$here/tools/system_packages.sh" debootstrap

if [ ! -d "$root" ]; then
    rm -rf "$root.partial"
    mkdir -p "$root.partial"
    debootstrap --variant=minbase --include=python3,python3-venv,python3-torch trixie "$root.partial" >"$root.log" ||
        { tail "$root.log" >&2; exit 1; }
    mv "$root.partial" "$root"
fi

# pip fills the folder from which pip inside installs.
rm -rf "$root/work"
mkdir -p "$root/work/wheels"
cp "$dist"/*-cp312-abi3-*_"$(uname -m)".whl "$root/work/wheels"
"$here/.venv-wheel/bin/python" -m pip download --quiet --only-binary=:all: --python-version 3.13 --dest "$root/work/wheels" \
    --platform "manylinux_2_28_$(uname -m)" --platform "manylinux_2_17_$(uname -m)" \
    "$root"/work/wheels/flowstone-*.whl $("$here/.venv-wheel/bin/python" - "$here/pyproject.toml" <<'END'
import sys, tomllib
wanted = ("hypothesis", "pytest", "safetensors")
print(*[one for one in tomllib.load(open(sys.argv[1], "rb"))["dependency-groups"]["dev"] if one.startswith(wanted)])
END
)
# Tests of the sources read them; what is imported is the wheel.
for one in tests examples docs native src README.md pyproject.toml; do cp -r "$here/$one" "$root/work"; done
cat >"$root/work/inside.sh" <<'END'
set -eu
mount -t proc proc /proc
mount -t sysfs sys /sys
export PATH=/work/env/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 OMP_NUM_THREADS=1
export USE_LIBUV=0 # Debian's torch is built without
! command -v cc gcc g++ clang make || { echo "there is a compiler here" >&2; exit 1; }
python3 -m venv --system-site-packages /work/env
pip install --quiet --no-index --find-links /work/wheels flowstone hypothesis pytest pytest-xdist safetensors 2>/dev/null
cd /work
python -c 'import torch; print("torch", torch.__version__); assert torch.__version__.startswith("2.6.")'
flowstone --version
flowstone demo --small
# What torch 2.6 itself, or Debian's build of it, cannot do:
#   _StridedShard of sizes that do not divide; FSDP2 after an evaluation on CPUs; dtypes of later versions; torchrun
#   without libuv. And Debian's Python has its heap at low addresses, where small tensors are examined one by one.
exec python -m pytest -p no:cacheprovider \
    --deselect tests/state/test_dtensors.py::test_what_any_ranks_save_any_ranks_load \
    --deselect tests/state/test_shards.py::test_runs_are_what_torch_leaves_to_each_rank \
    --deselect tests/state/test_fsdp2.py::test_after_an_evaluation_the_optimizer_may_come_before_the_model \
    --deselect tests/state/test_fsdp2.py::test_a_part_of_a_gathered_module_is_told_to_be_put_back \
    --deselect tests/state/test_refusals.py::test_tensors_for_results_have_the_dtype_and_shape \
    --deselect tests/test_examples.py::test_two_ranks_train_and_one_goes_on \
    --deselect tests/state/test_providers.py::test_no_call_for_each_tensor_is_made_where_no_provider_has_the_word \
    "$@"
END
exec unshare --mount --net --pid --fork --kill-child \
    "$here/.venv-wheel/bin/python" "$here/tests/wheels/loopback.py" /bin/sh -c '
    root=$1
    shift
    mount --rbind /dev "$root/dev"
    exec chroot "$root" sh /work/inside.sh "$@"
' sh "$root" "$@"
