#!/bin/sh
# Builds a Kubernetes control plane and Helm from Go modules, once; gets etcd from the system's packages.
# Usage: build_cluster_tools.sh FOLDER
# It takes an hour of one core and 6 GB of Go's caches; the programs are 430 MB.
set -eu
cd "$(dirname "$0")/../deploy/cluster-tools"
folder=$1
mkdir -p "$folder"
version=$(sed -n 's/^\tk8s.io\/kubernetes \(v[0-9.]*\)$/\1/p' go.mod)
minor=${version#v1.}
base=k8s.io/component-base/version
flags="-s -w -X $base.gitVersion=$version -X $base.gitMajor=1 -X $base.gitMinor=${minor%%.*}"

if [ ! -x "$folder/etcd" ]; then
    if etcd=$(command -v etcd); then
        ln -s "$etcd" "$folder/etcd"
    else
        work=$(mktemp -d)
        trap 'rm -rf "$work"' EXIT
        (cd "$work" && apt-get download etcd-server && dpkg -x etcd-server_*.deb .)
        cp "$work/usr/bin/etcd" "$folder/etcd"
    fi
fi
for package in \
    helm.sh/helm/v3/cmd/helm \
    k8s.io/kubernetes/cmd/kube-apiserver \
    k8s.io/kubernetes/cmd/kube-controller-manager \
    k8s.io/kubernetes/cmd/kube-scheduler \
    k8s.io/kubernetes/cmd/kubectl; do
    program=$folder/${package##*/}
    [ -x "$program" ] && continue
    echo "building ${package##*/} …"
    CGO_ENABLED=0 nice -n 19 go build -p 1 -trimpath -ldflags "$flags" -o "$program.new" "$package"
    mv "$program.new" "$program"
done
