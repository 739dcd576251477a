# The images to pull: `make images` builds them for this machine, .github/workflows/release.yml for both platforms, and pushes
# them. docker buildx bake -f docker/docker-bake.hcl, in the root of the checkout.
variable "VERSION" { default = "dev" }
variable "REVISION" { default = "" }
# with a slash at its end
variable "REGISTRY" { default = "" }
# such as linux/amd64,linux/arm64; empty: that of this machine
variable "PLATFORMS" { default = "" }

group "default" { targets = ["server", "database"] }

target "image" {
  platforms = PLATFORMS == "" ? [] : split(",", PLATFORMS)
  labels = {
    "org.opencontainers.image.title"       = "ml_rag"
    "org.opencontainers.image.description" = "Retrieval-augmented generation inside PostgreSQL, as one SQL call"
    "org.opencontainers.image.version"     = VERSION
    "org.opencontainers.image.revision"    = REVISION
    "org.opencontainers.image.licenses"    = "PostgreSQL"
  }
}

target "server" {
  inherits   = ["image"]
  dockerfile = "docker/server.Dockerfile"
  target     = "server"
  tags       = ["${REGISTRY}ml_rag-server:${VERSION}", "${REGISTRY}ml_rag-server:latest"]
}

# 17 is the default: compose.yaml
target "database" {
  name       = "database-${major}"
  matrix     = { major = ["15", "16", "17", "18"] }
  inherits   = ["image"]
  dockerfile = "docker/database.Dockerfile"
  args       = { POSTGRES = major }
  tags = concat(
    ["${REGISTRY}ml_rag-database:${VERSION}-pg${major}", "${REGISTRY}ml_rag-database:pg${major}"],
    major == "17" ? ["${REGISTRY}ml_rag-database:${VERSION}", "${REGISTRY}ml_rag-database:latest"] : [],
  )
}
