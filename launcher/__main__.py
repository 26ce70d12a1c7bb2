"""`python -m mlx_mesh.launcher` is `mlx-mesh`."""

import sys

from mlx_mesh.launcher.cli import main

sys.exit(main())
