#!/bin/bash
# A run of styrax on Slurm: sbatch slurm.sh
# One process a node, which uses all of its accelerators; with several tasks a node each uses the one of its number.
# Two minutes before the time limit, and when the job is preempted, every process gets SIGTERM: the run saves, ends
# with status 130, and the job is put back into the queue. The same script goes on from the newest checkpoint.

#SBATCH --job-name=styrax
#SBATCH --nodes=@PROCESSES@
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log

set -u -o pipefail

# Compiled steps and token stores, where all nodes see them.
export STYRAX_CACHE="${STYRAX_CACHE:-$HOME/.cache/styrax}"

# Slurm sends the signal to the processes alone, and one that fails ends all of them.
srun --kill-on-bad-exit=1 --label @COMMAND@
status=$?

if [ "$status" -eq 130 ] || [ "$status" -eq 143 ]; then
  echo "interrupted and saved; back into the queue"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
