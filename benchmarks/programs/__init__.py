"""Programs of the language: experiments, inputs, overlap."""
