"""Linear models and shared vectors: minibatches as SciPy's sparse matrices, tables and tensors as vectors and matrices.

Needs SciPy: `pip install 'elasticps[sparse]'`.
"""

from __future__ import annotations

from elasticps.sparse.batch import Batch, localize
from elasticps.sparse.views import Matrix, Vector

__all__ = ["Batch", "Matrix", "Vector", "localize"]
