#!/bin/bash
# Where process 0 is, and a port that is free there: usually the first host of the host file.
export JAX_COORDINATOR_ADDRESS="${JAX_COORDINATOR_ADDRESS:-node1:12345}"

# One process a host, with all of its 8 GPUs; the options are Open MPI's.
mpirun -n 4 --map-by ppr:1:node -x JAX_COORDINATOR_ADDRESS \
  autopar run --devices-per-process 8 examples/launch/train.py
