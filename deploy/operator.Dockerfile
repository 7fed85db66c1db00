# The operator's image. From the repository's root:
#
#   docker build -f deploy/operator.Dockerfile -t REGISTRY/everstep-operator:0.1.0 .
#   docker push REGISTRY/everstep-operator:0.1.0
#   everstep operator manifests --image REGISTRY/everstep-operator:0.1.0 | kubectl apply -f -
FROM python:3.11-slim
WORKDIR /everstep
COPY pyproject.toml README.md LICENSE ./
COPY requirements/constraints.txt requirements/
COPY src src
RUN pip install --no-cache-dir --constraint requirements/constraints.txt ".[kube]" && rm -rf /everstep/src
USER 65532:65532
ENTRYPOINT ["everstep"]
CMD ["operator", "run"]
