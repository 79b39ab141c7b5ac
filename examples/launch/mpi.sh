#!/bin/bash
# Where process 0 is, and a port that is free there: usually the first host of the host file.
export JAX_COORDINATOR_ADDRESS="${JAX_COORDINATOR_ADDRESS:-node1:12345}"

mpirun -n 4 -x JAX_COORDINATOR_ADDRESS autopar run examples/launch/train.py
