"""Latent factor models on a TorchRec EmbeddingBagCollection, all called as torchrec's DLRM is.

tables.py         embedding tables
first_order.py    weights beside the tables, one per row
collaborative.py  two sides, user and item: MatrixFactorization, MultiLayerPerceptron, NeuMF
factorization.py  any number of fields: FactorizationMachine, WideDeep, DeepFM
multi_task.py     several predictions: MultiGateMixtureOfExperts
sequential.py     what a user looked at before: DeepInterestNetwork, SelfAttentiveRecommender
torchrec_dlrm.py  torchrec's own DLRM and DLRM_DCN, sized
"""

from examples.models.collaborative import MatrixFactorization as MatrixFactorization
from examples.models.collaborative import MultiLayerPerceptron as MultiLayerPerceptron
from examples.models.collaborative import NeuMF as NeuMF
from examples.models.collaborative import ncf_tower as ncf_tower
from examples.models.factorization import DeepFM as DeepFM
from examples.models.factorization import FactorizationMachine as FactorizationMachine
from examples.models.factorization import WideDeep as WideDeep
from examples.models.first_order import FirstOrderWeights as FirstOrderWeights
from examples.models.first_order import SingleIdBiases as SingleIdBiases
from examples.models.first_order import log_odds as log_odds
from examples.models.multi_task import MultiGateMixtureOfExperts as MultiGateMixtureOfExperts
from examples.models.tables import SCALARS as SCALARS
from examples.models.tables import build_neumf_tables as build_neumf_tables
from examples.models.tables import build_tables as build_tables
from examples.models.tables import network_of_seed as network_of_seed
from examples.models.torchrec_dlrm import build_dlrm as build_dlrm
from examples.models.torchrec_dlrm import build_dlrm_dcn as build_dlrm_dcn
