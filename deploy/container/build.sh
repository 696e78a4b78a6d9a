#!/bin/sh
# Builds the images NAME:TAG and NAME-mpi:TAG from a base that is fixed by its digest. It works with docker and podman.
#
#   deploy/container/build.sh omnireduce:0.1.0               # from the base in base.lock; without the file, writes it first: commit it
#   deploy/container/build.sh --update omnireduce:0.1.0      # takes the base's newest state: commit base.lock
#   deploy/container/build.sh --warm omnireduce:0.1.0        # with kernels that are compiled for processors like this one
#   deploy/container/build.sh --push registry.example.com/omnireduce:0.1.0     # pushes both, and prints NAME@sha256:DIGEST of each
#
# A registry makes the digest of an image: without --push there is none to print. kubernetes/ wants it.
# BASE=IMAGE:TAG chooses another base; its Python must be the one that requirements.lock was made with. BUILDER chooses the tool.
set -eu

fail() { echo "build.sh: $*" >&2; exit 2; }

update='' push='' warm=''
while :; do
    case "${1:-}" in
    --update) update=1 ;;
    --push) push=1 ;;
    --warm) warm=1 ;;
    *) break ;;
    esac
    shift
done
case "${1:-}" in
*@* | -*) fail "got $1, expected NAME:TAG of the image to make" ;;
?*:?*) ;;
*) fail "expected NAME:TAG of the image to make, for example omnireduce:0.1.0" ;;
esac
name=${1%:*} tag=${1##*:}
here=$(cd "$(dirname "$0")" && pwd)
lock=$here/base.lock
builder=${BUILDER:-$(command -v docker || command -v podman)} || fail "no docker and no podman here: set BUILDER"

if [ -n "$update" ] || [ ! -e "$lock" ]; then
    base=${BASE:-python:3.11-slim-bookworm}
    "$builder" pull "$base" >&2
    digest=$("$builder" image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$base" | sed -n 1p)
    printf '# %s on %s, by build.sh\n%s\n' "$base" "$(date -u +%F)" "$digest" > "$lock.new"
else
    [ -z "${BASE:-}" ] || fail "BASE is $BASE, but base.lock has a base: call it with --update"
    cp "$lock" "$lock.new"
fi
base=$(grep -v '^#' "$lock.new") || true
if ! printf '%s\n' "$base" | grep -Exq '[^@[:space:]]+@sha256:[0-9a-f]{64}'; then
    rm -f "$lock.new"
    fail "the base is '$base', expected one line NAME@sha256:DIGEST; pull an image that a registry knows, with --update"
fi
mv "$lock.new" "$lock"

export BUILDAH_FORMAT=docker # the format that podman takes by default knows no HEALTHCHECK
for target in service mpi; do
    image=$name:$tag
    [ "$target" = service ] || image=$name-$target:$tag
    "$builder" build -f "$here/Containerfile" --build-arg "BASE=$base" --build-arg "WARM=$warm" --target "$target" -t "$image" "$here/../.." >&2
done
[ -n "$push" ] || exit 0

said=$(mktemp)
trap 'rm -f "$said"' EXIT
for image in "$name" "$name-mpi"; do
    if "$builder" push --help 2>&1 | grep -q -e --digestfile; then # podman
        "$builder" push --digestfile "$said" "$image:$tag" >&2
    else
        "$builder" push "$image:$tag" > "$said"
        cat "$said" >&2
    fi
    digest=$(grep -Eo 'sha256:[0-9a-f]{64}' "$said" | tail -n 1)
    [ -n "$digest" ] || fail "$image:$tag is pushed, but $builder told no digest"
    echo "$image@$digest"
done
