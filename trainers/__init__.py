"""One training run. Knows torch; knows neither Ray nor W&B nor what a study is."""
