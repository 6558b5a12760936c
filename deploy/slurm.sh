#!/bin/bash
#SBATCH --job-name=dapo
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --requeue
#SBATCH --open-mode=append
# A run over the nodes of a Slurm job: sbatch deploy/slurm.sh RUN RECIPE [KEY=VALUE ...]
# RUN: the run folder, on a file system of all nodes. If it is there, the run goes on from its last checkpoint: a job that
# was ended by its time limit (Slurm's SIGTERM, 300 s before it) or lost a node is put back into the queue, if it has written
# a checkpoint.
# The environment with dapo is that of the shell that calls sbatch.
set -euo pipefail

run=${1:?run folder} recipe=${2:?recipe}
shift 2
port=$((20000 + SLURM_JOB_ID % 20000))
address=$(hostname --ip-address | awk '{print $1}'):$port # this script runs on the first node
begun=$(mktemp)
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=token # the token is ~/.ray/auth_token, in the home that all nodes share
[ -e ~/.ray/auth_token ] || ray get-auth-token --generate >/dev/null

ray start --head --node-ip-address="${address%:*}" --port="$port" --num-cpus="$SLURM_CPUS_PER_TASK" \
  --num-gpus="$SLURM_GPUS_ON_NODE" --include-dashboard=false # ended with the job, as all of its processes are
if [ "$SLURM_NNODES" -gt 1 ]; then
  srun --overlap --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$(hostname -s)" \
    ray start --address="$address" --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$SLURM_GPUS_ON_NODE" --block &
fi
for _ in $(seq 60); do # until all nodes are there
  found=$(python3 -c "import ray; ray.init('$address', logging_level='ERROR'); print(sum(n['Alive'] for n in ray.nodes()))" || echo 0)
  [ "$found" -ge "$SLURM_NNODES" ] && break
  sleep 5
done

settings=("runtime.kind=ray" "runtime.address=$address" "$@")
if [ -e "$run" ]; then
  dapo train --resume "$run" "runtime.address=$address" &
else
  dapo train "$recipe" "run.dir=$run" "${settings[@]}" &
fi
child=$!
trap 'kill -TERM $child' TERM # it writes a checkpoint (run.stop_within_s)
code=0
wait $child || code=$?
if kill -0 $child 2>/dev/null; then # the signal ended the first wait
  code=0
  wait $child || code=$?
fi
if [ "$code" -ne 0 ] && [ -n "$(find "$run/checkpoints" -name manifest.json -newer "$begun" 2>/dev/null)" ]; then
  scontrol requeue "$SLURM_JOB_ID" # it was stopped, or lost a process, after it had got further
fi
exit "$code"
