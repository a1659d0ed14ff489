#!/bin/sh
# Prints what the pods have of a folder of keys and of a folder with a file of API keys; no key leaves
# this machine before you apply it:
#
#   mkdir http
#   tokenbus keys new --keys keys
#   tokenbus api-key NAME --file http/api-keys
#   deploy/kubernetes/secrets.sh keys http | kubectl apply -f -
#
# Once more after each 'tokenbus keys new NAME --keys keys' and 'tokenbus keys revoke NAME --keys keys':
# the broker that runs follows the files of the two ConfigMaps, which have public keys only.
set -eu
if [ $# != 2 ]; then
  echo "usage: $0 KEYS HTTP: a folder of 'tokenbus keys new', and one with api-keys, a file of" \
    "'tokenbus api-key', and the key files of tenants that it names" >&2
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
