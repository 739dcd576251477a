"""What the tests share: databases made from a template, stores, a reference retrieval, misbehaving model servers."""
