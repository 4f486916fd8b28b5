"""Tree speculative decoding of a Qwen3.5-type hybrid with a compiled tree.

Run it with ``python -m examples.tree_decoding``; the modules, in reading order:

    run.py      the command: prompts, rounds, and what is printed of them
    layers.py   Qwen3.5's layers cut open, so that the token mixer can be replaced
    model.py    a checkpoint folder as target, MTP head, tokenizer and prompts
    target.py   the target's pass over a tree, and the commit of the accepted path
    drafts.py   draft trees from the MTP head or from an n-gram table
    decode.py   the rounds, and plain decoding to compare with
    record.py   rounds as JSON lines
    positions.py a tree after every token of a text, for ../../benchmarks/budget.py
    sequence.py whole sequences, differentiable: for ../train_model.py only
"""
