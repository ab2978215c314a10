"""The first half hour on a machine with a GPU: three commands of at most nine minutes each.

    python -m benchmarks.first_gpu_run correctness    # outputs: no time counts unless this passes
    python -m benchmarks.first_gpu_run speed          # sites: ceilings, ratios to dense, time over k, decoding, tiles
    python -m benchmarks.first_gpu_run models         # host time per ACM, whole models, a training step, a calibration

    --dry             on a CPU with tiny shapes, kernels in Triton's interpreter: tries the commands, measures nothing
    --out FOLDER      for NAME.jsonl, NAME.log and NAME.txt of each command (runs/first_gpu_run)
    --minutes 9       of the whole command
    --parts A B       only these parts, in their order
    --anyway          measure although correctness has not passed on this card, with these versions and this code

A command runs its parts (`parts.py`) in order of importance, each as a process of its own, or several, with its own
limit, so that one that hangs or loses its CUDA context takes no other with it. Every row is a line of JSON that is in
the file as soon as it is measured; parts that there is no time left for are named as not run. Card, driver and
versions are in the rows that begin a part, clocks before and after it. At the end all rows are printed as tables.

Nothing is downloaded. Wheels of what a machine with torch and Triton may lack are fetched elsewhere beforehand, some
6 MB, and carried there with the checkout; only `models`, one test and the tables need them:

    python -m benchmarks.first_gpu_run.wheels wheels          # on a machine with a network
    python -m pip install --no-index --no-deps --target site wheels/*.whl && export PYTHONPATH=$PWD/site
"""
