"""One benchmark a module: ``cases(device, quick)``, the most telling case first."""
