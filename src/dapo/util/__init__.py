"""Files, processes, network and text: no concept of the field."""
