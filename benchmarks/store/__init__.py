"""Parts of ``benchmarks.page_store``: kvferry's store and its rivals behind one interface."""
