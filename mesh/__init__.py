"""Who is in the mesh and who holds what: vocabulary and pure decisions, without I/O."""
