"""Python objects between ranks: what may travel, as which bytes, and the calls that send them."""
