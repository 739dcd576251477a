"""All that is derived: answers of a table, embeddings of a column, further embeddings, vectorizers, node groups.

One loop makes it (``loop``); what waits, how it is claimed, what makes it and where it goes is a ``Derived``.
"""

#: module and class of what a routine derives
KINDS = {
    **dict.fromkeys(("ml_rag_table", "ml_generate_table", "ml_embed_table"), ("table", "Table")),
    "ml_rag.add_embedding": ("embedding", "Embedding"),
    "ml_rag.run_vectorizer": ("vectorizer", "Vectorizer"),
    "_embed_rows": ("vectorizer", "Written"),
    **dict.fromkeys(
        ("ml_rag.create_node_group", "ml_rag.refresh_node_groups", "fill_node_groups"), ("node_group", "NodeGroups")
    ),
}
