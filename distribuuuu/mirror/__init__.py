"""Runs in object storage: OUT_DIR may be a URL. The run works in a local folder, which a child process mirrors.

- client.py: start reading here. The side of the run: it starts the child process and waits for it at the end.
- __main__.py: the child process: one instance per folder, its messages, retries and the end.
- sync.py: what is downloaded at the start, uploaded during the run, and the detection of a second living run.
- urls.py: which URLs can hold a run.
- store.py: objects that are verified, and the index, mirror.json, which names those of a complete state.

The folder can be deleted: a URL is then refused as OUT_DIR, see config/run_files.py.
"""
