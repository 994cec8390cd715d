"""`pagepool serve`: an engine behind OpenAI's HTTP interface. The app needs the extra `serve`."""
