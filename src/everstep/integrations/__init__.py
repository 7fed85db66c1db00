"""Trackers of experiments: TensorBoard, Weights & Biases, MLflow. Each needs its extra, and is imported only
when a run uses it.
"""
