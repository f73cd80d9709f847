"""One benchmark a module: ``cases(device, quick, results)``, the most telling case first."""
