"""What a run says while it trains: when it reports and saves, how it is evaluated, and how its gradient noise is measured at weights that
stand still. What the driver reads of a run is not here: that loads no torch."""
