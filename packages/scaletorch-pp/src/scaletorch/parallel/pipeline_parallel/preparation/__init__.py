"""A whole plain model before it trains: its layers timed, its parameters made real."""
