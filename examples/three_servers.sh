#!/bin/sh
# Two servers that take batches and one that shows them, over one store: a folder that all of them
# see, or a bucket (s3://..., gs://..., az://...). Here they are on one machine; on several, give
# each `--host 0.0.0.0` and a TLS proxy in front (docs/server.md).
#
#   sh examples/three_servers.sh STORE [PORT]
set -eu
store=${1:?give a store: a folder, or the address of a bucket}
port=${2:-8401}
cirron=${CIRRON:-cirron}

key=$($cirron keys create trainers --store "$store")
$cirron serve --role ingest --store "$store" --port "$port" &
first=$!
$cirron serve --role ingest --store "$store" --port "$((port + 1))" &
second=$!
$cirron serve --role page --store "$store" --port "$((port + 2))" --no-browser &
page=$!
trap 'kill $first $second $page 2>/dev/null; wait' EXIT INT TERM

echo "CIRRON_API_ENDPOINT=http://127.0.0.1:$port CIRRON_API_KEY=$key"
echo "CIRRON_API_ENDPOINT=http://127.0.0.1:$((port + 1)) CIRRON_API_KEY=$key"
wait
