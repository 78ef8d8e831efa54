#!/bin/bash
# The folder of the script is sent to the cluster.
# Where its nodes have nbaccel already: RUNTIME_ENV='{}' bash @{stem}_ray.sh
set -euo pipefail
packages='{"pip": ["nbaccel[ray]==@version"]}'
ray job submit \
  --address "${RAY_ADDRESS:-http://127.0.0.1:8265}" \
  --working-dir . \
  --runtime-env-json "${RUNTIME_ENV:-$packages}" \
@resource_line  -- @command
