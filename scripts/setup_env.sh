#!/usr/bin/env bash
# Makes or updates a virtual environment; does nothing when it is up to date.
#
#   scripts/setup_env.sh PYTHON FOLDER LEVEL
#
# LEVEL is run (farspan and its trainer), test (and what the tests need) or dev (and the checks).
# Versions and hashes come from requirements/constraints.txt.
#   EXTRAS=train,tpu    the extras to install; default: train
#   INSTALLER=pip       do without uv
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

python=$1
folder=$2
level=$3
extras=${EXTRAS:-train}
constraints=requirements/constraints.txt
venv_python=$folder/bin/python

say() { printf 'setup: %s\n' "$*" >&2; }

# The interpreter behind $1 as "3.12.1 of /usr"; fails below Python 3.11.
describe() {
    "$1" -c 'import sys; v = sys.version_info; print(*v[:3], sep=".", end=f" of {sys.base_prefix}"); sys.exit(v < (3, 11))'
}

# pip for the new environment, which itself holds none: that saves seconds.
pip_install() {
    if "$python" -m pip --version >/dev/null 2>&1; then
        "$python" -m pip --python "$venv_python" install --quiet --disable-pip-version-check "$@"
    else
        "$venv_python" -m ensurepip >/dev/null
        "$venv_python" -m pip install --quiet --disable-pip-version-check "$@"
    fi
}

install_uv() {
    local pinned=$folder/uv.txt
    sed -n '/^uv==/,/[^\\]$/p' "$constraints" >"$pinned"
    [ "$("$folder/bin/uv" --version 2>/dev/null | cut -d' ' -f2)" = "$(sed -n 's/^uv==\([^ ]*\).*/\1/p' "$pinned")" ] ||
        pip_install --require-hashes --no-deps --requirement "$pinned"
}

case $level in
run) group='' covers='run' ;;
test) group='--group test' covers='run test' ;;
dev) group='--group dev' covers='run test dev' ;;
*) say "LEVEL must be run, test or dev, got $level" && exit 2 ;;
esac

if ! base=$(describe "$python"); then
    say "farspan needs Python 3.11 or newer, got ${base:-no answer} from '$python'; name another with PYTHON=/path/to/python"
    exit 1
fi
state="$PWD $base [$extras] $(cat pyproject.toml "$constraints" scripts/setup_env.sh | cksum)"
[ "$(cat "$folder/.up-to-date-$level" 2>/dev/null)" != "$state" ] || exit 0

if [ "$(describe "$venv_python" 2>/dev/null)" != "$base" ]; then
    say "making $folder with Python $base"
    "$python" -m venv --clear --without-pip "$folder"
fi
rm -f "$folder"/.up-to-date-*

say "installing farspan[$extras] for: $covers"
if [ "${INSTALLER:-uv}" = uv ] && install_uv; then
    quiet=--quiet
    [ ! -t 2 ] || quiet=''
    # shellcheck disable=SC2086  # $quiet and $group are zero or more words
    "$folder/bin/uv" pip install $quiet --python "$venv_python" --constraints "$constraints" \
        --build-constraints "$constraints" --editable ".[$extras]" $group
else
    say "without uv: plain pip, slower, the same versions, hashes unchecked"
    # pip cannot check hashes beside an editable install.
    sed -e '/^ *--hash=/d' -e 's/ *\\$//' "$constraints" >"$folder/versions.txt"
    pip_install 'pip>=25.1' # the first with --group
    # shellcheck disable=SC2086
    "$venv_python" -m pip install --quiet --constraint "$folder/versions.txt" --editable ".[$extras]" $group
fi

# The first import compiles exactly the modules in use. It must be told to keep the result: many
# machines set PYTHONDONTWRITEBYTECODE, and then every start of jax would compile again.
say "compiling bytecode"
env -u PYTHONDONTWRITEBYTECODE "$venv_python" - <<'PYTHON'
import contextlib
import importlib

for name in (
    "jax.experimental.pallas",
    *("jaxtyping", "optax", "orbax.checkpoint", "grain", "tyro", "rich.console"),
    *("beartype", "hypothesis", "xdist.plugin"),
):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
PYTHON

for covered in $covers; do
    printf '%s\n' "$state" >"$folder/.up-to-date-$covered"
done
say "$folder is ready after $SECONDS s"
