"""`shardstep demo`: the same small GPT trained with DDP + AdamW and with shardstep, and what differs.

In the order in which a run goes through them:

- `settings.py`   what can be chosen, and every way in which it can be wrong
- `launch.py`     starts the ranks under torchrun, follows them, stops them, says which one failed
- `worker.py`     one rank: trains a model (`gpt.py`) of a text (`corpus.py`) in three ways, and measures them
- `exchange.py`   what came out, and the folder in which rank 0 writes it for the command
- `report.py`     what is printed;  `picture.py` what is drawn
"""
