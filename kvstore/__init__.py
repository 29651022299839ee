"""Package marker; public names are exported here."""
