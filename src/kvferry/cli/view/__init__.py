"""The operator's view of a store: what `kvferry exporter` and `kvferry dashboard` see and say."""
