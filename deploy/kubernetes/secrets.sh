#!/bin/sh
# Prints what the pods have of a folder of keys and of a file of API keys; no key leaves this machine
# before you apply it:
#
#   tokenbus keys new --keys keys
#   tokenbus api-key NAME --file api-keys
#   deploy/kubernetes/secrets.sh keys api-keys | kubectl apply -f -
#
# Once more after each 'tokenbus keys new NAME --keys keys' and 'tokenbus keys revoke NAME --keys keys':
# the broker that runs follows the files of the two ConfigMaps, which have public keys only.
set -eu
if [ $# != 2 ]; then
  echo "usage: $0 KEYS API_KEYS: a folder of 'tokenbus keys new', a file of 'tokenbus api-key'" >&2
  exit 2
fi

create() {
  kubectl create "$@" --namespace=tokenbus --dry-run=client --output=yaml
  echo ---
}

create secret generic tokenbus-broker-key --from-file=broker.key="$1/broker.key"
create secret generic tokenbus-worker-key --from-file=worker.key="$1/local-worker.key"
create secret generic tokenbus-client-key --from-file=client.key="$1/local-client.key"
create secret generic tokenbus-api-keys --from-file=api-keys="$2"
create configmap tokenbus-clients --from-file="$1/clients"
create configmap tokenbus-workers --from-file="$1/workers"
