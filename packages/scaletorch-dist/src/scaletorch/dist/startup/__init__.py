"""Start-up of a rank: rendezvous, roll call and creation of the default group."""
