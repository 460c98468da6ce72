#!/bin/sh
# Everything about Flowstone that needs a GPU: checked and measured in one run of under nine minutes, on a machine
# that has a GPU, Python and torch, and no network.
#
#   tools/gpu_session.sh pack            beforehand, where there is a network: wheels for that machine's Python
#   tools/gpu_session.sh run OUT [...]   there, from the root of this tree: results into OUT. Options: python -m bench.gpu -h
#
#   WHEELS=build/gpu-session   where wheels are put, and looked for
#   VERSION=3.12               the Python that they are for (pack)
#   PYTHON=python3             the one that has torch (run)
#
# `run` takes Flowstone from WHEELS, with what it needs and the machine lacks; where no wheel fits, it is built from
# this tree, which takes a compiler for C++20 and a minute or two more; without WHEELS, it is the Flowstone that PYTHON
# has. Nothing is installed into PYTHON's own place.
set -eu
cd "$(dirname "$0")/.."
wheels=${WHEELS:-build/gpu-session}
python=${PYTHON:-python3}

# What pyproject.toml asks for. Tests need what they are known to run with: an older pytest may be there.
needed=$(sed -n 's/^dependencies = \[\(.*\)\]$/\1/p' pyproject.toml | tr -d '",')
tests=$(grep -o '"\(pytest\|hypothesis\|safetensors\)==[^"]*"' pyproject.toml | sort -u | tr -d '"')
building="$(sed -n 's/^requires = \[\(.*\)\]$/\1/p' pyproject.toml | tr -d '",') cmake ninja"

pack() {
    version=${VERSION:-3.12}
    make wheel WHEEL_PYTHONS="python$version"
    rm -rf "$wheels"
    mkdir -p "$wheels"
    cp dist/flowstone-*.whl "$wheels"
    platforms=""
    for tag in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014 manylinux_2_5 manylinux1; do
        platforms="$platforms --platform ${tag}_$(uname -m)"
    done
    # What Flowstone, its tests and a rival need, what would build Flowstone there, and pip, which an environment may lack.
    # Not torch: it is there, and large.
    # shellcheck disable=SC2086  # lists of words
    .venv-wheel/bin/python -m pip download --quiet --dest "$wheels" --only-binary=:all: --python-version "$version" \
        --implementation cp --abi "cp$(echo "$version" | tr -d .)" --abi abi3 --abi none $platforms \
        $needed $tests $building pip
    # Without what it asks for, which is torch.
    .venv-wheel/bin/python -m pip download --quiet --dest "$wheels" --no-deps "$(grep '^torch-checkpointing' bench/pins/*.txt | sed 's/.*://')"
    du -sh "$wheels"
}

# pip of PYTHON, or the one that was carried, which runs from its wheel.
pip() {
    if "$python" -m pip --version > /dev/null 2>&1; then
        "$python" -m pip "$@"
    else
        "$python" "$(echo "$wheels"/pip-*.whl)/pip" "$@"
    fi
}

run() {
    out=$1
    shift
    "$python" -c 'import torch' || { echo "gpu_session.sh: $python has no torch; PYTHON= says which one has" >&2; exit 2; }
    if [ -d "$wheels" ]; then
        site=$(mktemp -d)
        trap 'rm -rf "$site"' EXIT
        # An environment above PYTHON's: what that has is not installed again.
        "$python" -m venv --without-pip "$site"
        "$python" -c 'import site; print(*site.getsitepackages(), *[site.getusersitepackages()] * bool(site.ENABLE_USER_SITE), sep="\n")' > "$("$site/bin/python" -c \
            'import sysconfig; print(sysconfig.get_path("purelib"))')/above.pth"
        install() { pip --python "$site/bin/python" install --quiet --no-index --find-links "$wheels" "$@"; }
        # shellcheck disable=SC2086  # lists of words
        install $needed $tests
        # From WHEELS or this tree, also where PYTHON has one.
        install --ignore-installed --no-deps --only-binary flowstone flowstone || build
        install --no-deps torch-checkpointing || echo "torch-checkpointing is left out of the rivals" >&2
        python=$site/bin/python
    fi
    PYTHONPATH=. "$python" -m bench.gpu --out "$out" "$@"
}

# `pip install` leaves an environment's own commands, which are cmake and ninja, out of the path.
build() {
    echo "gpu_session.sh: no wheel of Flowstone in $wheels fits; building it" >&2
    # shellcheck disable=SC2086  # a list of words
    install $building
    PATH="$site/bin:$PATH" install --ignore-installed --no-deps --no-build-isolation --config-settings=build-dir="$site/build" .
}

case ${1:-} in
    pack) pack ;;
    run) shift; [ $# -gt 0 ] || { echo "gpu_session.sh run OUT: where results are to go" >&2; exit 2; }; run "$@" ;;
    *) sed -n '2,15s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
