#!/bin/sh
# Format native/ with the clang-format of .venv, by .clang-format.
#
#   native/format.sh           in place
#   native/format.sh --check   change nothing, and fail if a file is not formatted (`make check`; takes about 1 s)
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
case ${1-} in
    '') options=-i ;;
    --check) options="--dry-run -Werror --ferror-limit=1" ;;
    *) echo "format.sh: unknown option '$1' (--check)" >&2; exit 2 ;;
esac
# shellcheck disable=SC2086  # several options
find "$root/native" -name '*.[ch]' -o -name '*.cpp' | sort | xargs "$root/.venv/bin/clang-format" $options
