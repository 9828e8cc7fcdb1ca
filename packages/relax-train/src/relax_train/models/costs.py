"""Cost of computing a sequence, from the shape of the model."""

from relax_data.packing.costs import CostModel

from relax_train.models.shape import ModelShape


def cost_model(shape: ModelShape) -> CostModel:
    """FLOPs of a forward pass over a sequence by its length; parallel sizes and backward scale all of it alike."""
    return CostModel.from_shape(
        parameters=shape.multiplied_parameters,
        num_layers=shape.layers,
        num_attention_heads=shape.heads,
        head_dim=shape.head_dim,
    )
