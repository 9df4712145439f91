//! `GET /v1/models` and `GET /v1/models/{name}`.

use std::sync::Arc;

use axum::Json;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use serde::Serialize;

use crate::app::App;
use crate::error::ApiError;
use crate::models;

#[derive(Debug, Serialize)]
pub struct ModelList {
    object: &'static str,
    data: Vec<Model>,
}

#[derive(Debug, Serialize)]
pub struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// Prompt and output together, in tokens; null while no worker has told it.
    max_model_len: Option<u32>,
}

fn entry(app: &App, name: &str, model: &models::Model) -> Model {
    Model {
        id: name.to_owned(),
        object: "model",
        created: app.started_unix_s,
        owned_by: "tasuki",
        max_model_len: app
            .generator
            .limits(model.id)
            .map(|limits| limits.max_model_len),
    }
}

/// Of models that workers of other engines serve.
fn foreign_entries(app: &App) -> Vec<Model> {
    let models = app.foreign_models();
    let entries = models.iter().flat_map(|model| {
        let names = model.names.iter();
        names.map(|name| (name, model.max_model_len))
    });
    let entries = entries.map(|(name, max_model_len)| Model {
        id: name.clone(),
        object: "model",
        created: app.started_unix_s,
        owned_by: "tasuki",
        max_model_len,
    });
    entries.collect()
}

/// All names of the served models.
pub async fn list(State(app): State<Arc<App>>) -> Json<ModelList> {
    Json(ModelList {
        object: "list",
        data: app
            .models
            .named()
            .map(|(name, model)| entry(&app, name, model))
            .chain(foreign_entries(&app))
            .collect(),
    })
}

/// One of them.
pub async fn retrieve(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Json<Model>, ApiError> {
    let Path(name) = name.map_err(|_| ApiError::UnknownModel {
        requested: "(not UTF-8)".to_owned(),
        served: app.models.served(),
    })?;
    if app.find_foreign(Some(&name))?.is_some() {
        let mut entries = foreign_entries(&app).into_iter();
        if let Some(entry) = entries.find(|entry| entry.id == name) {
            return Ok(Json(entry));
        }
    }
    let (name, model) = app.models.find(Some(&name))?;
    Ok(Json(entry(&app, &name, &model)))
}
