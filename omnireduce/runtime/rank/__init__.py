"""The side of a rank: it joins a job, submits collectives and drives them."""
