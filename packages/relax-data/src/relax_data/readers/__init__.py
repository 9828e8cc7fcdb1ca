"""Files of rows: jsonl, parquet and Hugging Face datasets behind one protocol.

Door: :func:`relax_data.readers.open.open_rows` for one file, :func:`relax_data.readers.files.resolve_files` for many.
"""
