#!/bin/sh
# The start script of the job, the same on both nodes and at every start. What a user edits when the number of cards
# changes comes from the environment: TO, CARDS and the arguments of the trainer in ARGUMENTS.
exec "$RESHARD" resume "$RUN" --to "$TO" --local "$LOCAL" --nodes 2 --node "$NODE" -- \
    "$PYTHON" -m paddle.distributed.launch --master "$MASTER" --host 127.0.0.1 --nnodes 2 --rank "$NODE" \
    --nproc_per_node "$CARDS" --log_dir "$LOGS" "$SCRIPT" $ARGUMENTS
