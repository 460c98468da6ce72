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
# this tree; without WHEELS, it is the Flowstone that PYTHON has. Nothing is installed into PYTHON's own place.
set -eu
cd "$(dirname "$0")/.."
wheels=${WHEELS:-build/gpu-session}
python=${PYTHON:-python3}

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
    # What Flowstone, its tests and a rival need, and what would build Flowstone there. Not torch: it is there, and large.
    # shellcheck disable=SC2046,SC2086  # lists of words
    .venv-wheel/bin/python -m pip download --quiet --dest "$wheels" --only-binary=:all: --python-version "$version" \
        --implementation cp --abi "cp$(echo "$version" | tr -d .)" --abi abi3 --abi none $platforms \
        $(sed -n 's/^dependencies = \[\(.*\)\]$/\1/p' pyproject.toml | tr -d '",') \
        $(sed -n 's/^requires = \[\(.*\)\]$/\1/p' pyproject.toml | tr -d '",') \
        $(grep -o '"\(pytest\|hypothesis\|safetensors\)==[^"]*"' pyproject.toml | sort -u | tr -d '"')
    # Without what it asks for, which is torch.
    .venv-wheel/bin/python -m pip download --quiet --dest "$wheels" --no-deps "$(grep '^torch-checkpointing' bench/pins/*.txt | sed 's/.*://')"
    du -sh "$wheels"
}

run() {
    out=$1
    shift
    if [ -d "$wheels" ]; then
        site=$(mktemp -d)
        trap 'rm -rf "$site"' EXIT
        # An environment above PYTHON's: what that has is not installed again.
        "$python" -m venv --without-pip "$site"
        "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' > "$("$site/bin/python" -c \
            'import sysconfig; print(sysconfig.get_path("purelib"))')/above.pth"
        install() { "$python" -m pip --python "$site/bin/python" install --quiet --no-index --find-links "$wheels" "$@"; }
        install pytest hypothesis safetensors
        install flowstone || { install scikit-build-core nanobind hatch-fancy-pypi-readme && install --no-build-isolation .; }
        install --no-deps torch-checkpointing || echo "torch-checkpointing is left out of the rivals" >&2
        python=$site/bin/python
    fi
    PYTHONPATH=. "$python" -m bench.gpu --out "$out" "$@"
}

case ${1:-} in
    pack) pack ;;
    run) shift; [ $# -gt 0 ] || { echo "gpu_session.sh run OUT: where results are to go" >&2; exit 2; }; run "$@" ;;
    *) sed -n '2,14s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
esac
