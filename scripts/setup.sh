#!/usr/bin/env bash
# Makes .venv and fills it. `setup.sh demo` is what the demo needs, `setup.sh all` what everything needs.
# Says first what it is going to do. The second time there is nothing to do, and it takes no time.
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-all}
constraints=requirements/constraints.txt
case $what in
    demo) extras=jax; frameworks=() ;;
    # torch first and by its exact version, so that nothing that wants a torch brings another.
    all) extras=jax,torch,torchft,transformers,lightning,ray,kube,metrics,tensorboard,wandb,mlflow,plot,docs,dev; frameworks=("$(grep '^torch==' "$constraints")") ;;
    *) echo "setup: unknown set '$what': use demo or all" >&2; exit 2 ;;
esac

fail() {
    printf '\n  !! %s\n\n' "$@" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3.11 python3.12 python3.13 python3 python; do
        if command -v "$candidate" >/dev/null &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    return 1
}

case $(uname -s) in
    Linux | Darwin) ;;
    *) fail "Everstep runs on Linux and macOS; this is $(uname -s)." ;;
esac

python=$(find_python) ||
    fail "No Python of at least 3.11 is on this machine's PATH." "Install one, or name it: make setup PYTHON=/path/to/python3.11"
version=$("$python" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])')

digest=$("$python" -c '
import hashlib, sys
print(hashlib.sha256(b"".join(open(name, "rb").read() for name in sys.argv[1:])).hexdigest()[:16])
' pyproject.toml "$constraints" scripts/setup.sh)
stamp=$version-$digest
recorded() { [ -x .venv/bin/python ] && [ "$(cat ".venv/.everstep-$1" 2>/dev/null)" = "$stamp" ]; }
# The Kubernetes API server that the operator's tests use. Other tests do without it, so a machine that can't have one
# is told so loudly, and goes on; CI doesn't.
api_server() {
    if [ "$what" != all ] || scripts/kube-apiserver.sh >/dev/null; then
        return
    fi
    printf '\n  !! %s\n\n' "There is no Kubernetes API server here (see above): the operator's tests will be skipped." >&2
    [ -z "${EVERSTEP_CI:-}" ] || exit 1
}
as_root=()
[ "$(id -u)" = 0 ] || as_root=(sudo -n)
can_install() { command -v apt-get >/dev/null && { [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; }; }
install_packages() {
    "${as_root[@]}" apt-get update -qq
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
}
# Redis keeps the head's state in one of the operator's tests. As for the API server: loud, and CI doesn't go on.
needs_redis() { [ "$what" = all ] && ! command -v redis-server >/dev/null; }
redis() {
    needs_redis || return 0
    if can_install && install_packages redis-server; then
        return
    fi
    printf '\n  !! %s\n\n' "There is no redis-server here, and it can't be installed: the tests of a head that outlives itself will be skipped. Install it: sudo apt-get install redis-server" >&2
    [ -z "${EVERSTEP_CI:-}" ] || exit 1
}
# A browser for the tests of the page. The same again.
needs_browser() { [ "$what" = all ] && ! command -v chromium >/dev/null && ! command -v google-chrome >/dev/null; }
browser() {
    needs_browser || return 0
    if can_install && install_packages chromium; then
        return
    fi
    printf '\n  !! %s\n\n' "There is no Chromium here, and it can't be installed: the tests of the page in a browser will be skipped. Install it: sudo apt-get install chromium" >&2
    [ -z "${EVERSTEP_CI:-}" ] || exit 1
}
if recorded all || recorded "$what"; then
    redis
    browser
    api_server
    exit 0
fi

# Debian ships venv without its own pip; another pip can put one there, else the system package can.
venv_by=$("$python" -c 'import venv, ensurepip; print("venv")' 2>/dev/null || true)
if [ -z "$venv_by" ]; then
    if "$python" -c 'import venv, pip; assert int(pip.__version__.split(".")[0]) >= 23' 2>/dev/null; then
        venv_by=pip
    elif can_install; then
        venv_by=apt
    else
        fail "Python $version here can't make virtual environments (no ensurepip), and has no pip of at least 23." \
            "Install its venv package, for example: sudo apt-get install python3-venv"
    fi
fi

pinned=$(grep -c == "$constraints")
echo "Setting up ($what):"
echo "  Python  $version, $python"
if [ "$what" = demo ]; then
    echo "  fetch   Everstep's own few dependencies, JAX and NumPy for CPU, about 150 MB, by pip, exact versions from $constraints"
else
    echo "  fetch   up to $pinned packages by pip, exact versions from $constraints:"
    echo "          JAX, PyTorch with torchft, Ray with Ray Train, pandas, Matplotlib, trackers of experiments, and the tools for tests and documentation, about 780 MB with a torch for CPU"
fi
server=
[ "$what" = demo ] || server=$(scripts/kube-apiserver.sh --plan)
if [ -n "$server" ]; then
    echo "  fetch   a Kubernetes API server for the operator's tests: $server"
    echo "  build   Everstep itself, in place; and kube-apiserver"
    echo "  into    .venv in this folder, and the cache above"
else
    echo "  build   Everstep itself, in place; nothing is compiled"
    echo "  into    .venv in this folder, nowhere else"
fi
system=()
[ "$venv_by" != apt ] || system+=(python3-venv)
if needs_redis && can_install; then system+=(redis-server); fi
if needs_browser && can_install; then system+=(chromium); fi
if [ ${#system[@]} -gt 0 ]; then
    echo "  root    system packages, by apt-get: ${system[*]}"
else
    echo "  root    nothing"
fi
echo

if [ "$venv_by" = apt ]; then
    install_packages python3-venv
fi

# Half a .venv, or one of another Python, is no ground to build on.
if ! .venv/bin/python -c "import sys; sys.exit('%d.%d.%d' % sys.version_info[:3] != '$version')" 2>/dev/null; then
    rm -rf .venv
    if [ "$venv_by" = pip ]; then
        "$python" -m venv --without-pip .venv
        "$python" -m pip --python .venv/bin/python install --quiet pip
    else
        "$python" -m venv .venv
    fi
fi
rm -f .venv/.everstep-*

install() { .venv/bin/python -m pip install --disable-pip-version-check --constraint "$constraints" "$@"; }
install --quiet hatchling editables
if [ ${#frameworks[@]} -gt 0 ]; then
    install "${frameworks[@]}"
fi
# Built with the pinned hatchling above, not with one that pip would fetch aside.
install --no-build-isolation --editable ".[$extras]"

echo "$stamp" >".venv/.everstep-$what"
redis
browser
api_server
