"""Makes work, measures, reports. Looks at the engine, which knows nothing of it."""
