#!/usr/bin/env bash
# A real Kubernetes API server for the tests: etcd, kube-apiserver and kubectl, side by side in one folder.
#
# Taken from KUBEBUILDER_ASSETS or the PATH where they are there. Else, on Debian 12, etcd and kubectl come from Debian's packages
# and kube-apiserver is built from Debian's source package, unpacked in a cache outside the checkout: nothing is
# installed, and nothing needs root. Prints the folder as its last line; the second time that is all it does.
#
#   scripts/kube-apiserver.sh            get them
#   scripts/kube-apiserver.sh --plan     one line on what that would take; nothing if they are there
set -euo pipefail

release=1.20.2
recipe=1 # goes up when what is built changes
cache=${XDG_CACHE_HOME:-$HOME/.cache}/everstep/kube
home=$cache/$release-$recipe

fail() {
    printf '\n  !! %s\n' "$@" >&2
    printf '\n' >&2
    exit 1
}

have_all() { [ -x "$1/etcd" ] && [ -x "$1/kube-apiserver" ] && [ -x "$1/kubectl" ]; }

found() {
    local folder
    if [ -n "${KUBEBUILDER_ASSETS:-}" ] && have_all "$KUBEBUILDER_ASSETS"; then
        echo "$KUBEBUILDER_ASSETS"
    elif folder=$(dirname "$(command -v kube-apiserver || echo /nowhere/x)") && have_all "$folder"; then
        echo "$folder"
    elif have_all "$home"; then
        echo "$home"
    else
        return 1
    fi
}

if folder=$(found); then
    [ "${1:-}" = --plan ] || echo "$folder"
    exit 0
fi
if [ "${1:-}" = --plan ]; then
    echo "etcd, kubectl, Go 1.19 and Kubernetes $release's source from Debian (about 135 MB); kube-apiserver is compiled, once, in about 10 minutes, into ${home/#$HOME/\~}"
    exit 0
fi

codename=$(. /etc/os-release 2>/dev/null && echo "${VERSION_CODENAME:-}") || true
if [ "$codename" != bookworm ] || ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    fail "No Kubernetes API server for the tests: it is built from Debian 12's source package, and this isn't Debian 12." \
        "Put etcd, kube-apiserver and kubectl in one folder (setup-envtest does), and name it: export KUBEBUILDER_ASSETS=/path/to/it"
fi
for tool in make gcc flock tar; do
    command -v "$tool" >/dev/null || fail "Building kube-apiserver needs $tool, which isn't on the PATH." "Install it: apt-get install build-essential util-linux tar"
done

mkdir -p "$cache"
exec 9>"$cache/lock"
if ! flock --nonblock 9; then
    echo "kube-apiserver: another build is under way; waiting for it" >&2
    flock 9
    if folder=$(found); then
        echo "$folder"
        exit 0
    fi
fi

work=$cache/build
rm -rf "$work"
trap 'rm -rf "$work"' EXIT
mkdir -p "$work"/{sources,lists/partial,archives/partial,debs,root,bin}

# This machine's own sources of Debian packages, with the source packages, in lists of our own.
for file in /etc/apt/sources.list.d/*.sources; do
    [ -e "$file" ] && grep -q bookworm "$file" && sed 's/^Types:.*/Types: deb deb-src/' "$file" >"$work/sources/$(basename "$file")"
done || true
for file in /etc/apt/sources.list /etc/apt/sources.list.d/*.list; do
    [ -e "$file" ] && sed -n 's/^deb \(.*bookworm.*\)$/deb \1\ndeb-src \1/p' "$file" >"$work/sources/$(basename "$file" .list).list"
done || true
apt() {
    apt-get -qq -o Dir::Etc::sourcelist=/dev/null -o Dir::Etc::sourceparts="$work/sources" -o Dir::State::lists="$work/lists" \
        -o Dir::Cache="$work" -o APT::Sandbox::User="$(id -un)" "$@" >&2
}

echo "kube-apiserver: fetching etcd, kubectl, Go 1.19 and the source of Kubernetes $release" >&2
cd "$work/debs"
apt update || fail "apt-get can't read this machine's package lists (see above)."
apt download etcd-server kubernetes-client golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
apt source --download-only kubernetes
for package in *.deb; do dpkg-deb -x "$package" "$work/root"; done

gopath=$work/go
tree=$gopath/src/k8s.io/kubernetes
mkdir -p "$tree"
tar xf kubernetes_*.orig.tar.* --strip-components=1 -C "$tree"
# The vendored reflect2 1.0.1 crashes under Go 1.18 and later at the first custom resource.
rm -rf "$tree/vendor/github.com/modern-go/reflect2"
cp -r "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2" "$tree/vendor/github.com/modern-go/reflect2"

export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$gopath GOCACHE=$work/gocache GO111MODULE=off GOFLAGS= CGO_ENABLED=0 HOME=$work
# Debian's GOROOT is links into /usr/share: made to point inside the unpacked tree.
find "$GOROOT" -maxdepth 1 -type l | while read -r link; do
    ln -sfn "$work/root/usr/share/go-1.19/$(basename "$link")" "$link"
done
# All that the build asks of rsync is to copy a file into a folder (rsync -pc FILE FOLDER).
printf '#!/bin/sh\nexec cp -p "$2" "$3"\n' >"$work/root/usr/bin/rsync"
chmod +x "$work/root/usr/bin/rsync"
export PATH=$GOROOT/bin:$PATH:$work/root/usr/bin
cd "$tree"

echo "kube-apiserver: generating code (about a minute)" >&2
make generated_files >"$work/generate.log" 2>&1 || { tail -20 "$work/generate.log" >&2; fail "Generating Kubernetes' code failed (see above)."; }

package=k8s.io/component-base/version
total=$(go list -deps ./cmd/kube-apiserver | wc -l)
flags="-X $package.gitVersion=v$release -X $package.gitMajor=1 -X $package.gitMinor=20 -X $package.gitTreeState=archive"
{ go build -v -o "$work/bin/kube-apiserver" -ldflags "-s -w $flags" ./cmd/kube-apiserver 2>&1 || touch "$work/failed"; } |
    awk -v total="$total" '
        /^[a-z0-9.\/_-]+$/ { if (++n % 50 == 0) { printf "kube-apiserver: compiled %d of at most %d packages\n", n, total; fflush() } next }
        { print; fflush() }' >&2
[ ! -e "$work/failed" ] || fail "Building kube-apiserver failed (see above)."

cp "$work/root/usr/bin/etcd" "$work/root/usr/bin/kubectl" "$work/bin/"
rm -rf "$home"
mv "$work/bin" "$home"
echo "$home"
