#!/bin/sh
# Prints the Secrets and ConfigMaps of the pods, from a folder of keys and a folder with the file of API
# keys. The keys remain on this machine until you apply the output:
#
#   mkdir http
#   tokenbus keys new --keys keys
#   tokenbus api-key NAME --file http/api-keys
#   deploy/kubernetes/secrets.sh keys http | kubectl apply -f -
#
# Repeat the last command after each 'tokenbus keys new NAME --keys keys' and 'tokenbus keys revoke NAME
# --keys keys'. The running broker reads the two ConfigMaps again, which have only public keys.
set -eu
if [ $# != 2 ]; then
  echo "usage: $0 KEYS HTTP; KEYS: folder that 'tokenbus keys new' has filled; HTTP: folder with the" \
    "file api-keys of 'tokenbus api-key' and the key files of its tenants" >&2
  exit 2
fi

create() {
  kubectl create "$@" --namespace=tokenbus --dry-run=client --output=yaml
  echo ---
}

create secret generic tokenbus-broker-key --from-file=broker.key="$1/broker.key"
create secret generic tokenbus-worker-key --from-file=worker.key="$1/local-worker.key"
create secret generic tokenbus-client-key --from-file=client.key="$1/local-client.key"
create secret generic tokenbus-api-keys --from-file="$2"
create configmap tokenbus-clients --from-file="$1/clients"
create configmap tokenbus-workers --from-file="$1/workers"
