//! The schema of the whole configuration, composed of the types in [`crate::settings`].

use std::sync::LazyLock;

use schemars::Schema;
use schemars::generate::SchemaSettings;
use schemars::transform::RecursiveTransform;
use serde_json::{Value, json};

use crate::settings::ConfigSettings;

/// The schema of a whole configuration file.
pub fn root_schema() -> &'static Value {
    static ROOT: LazyLock<Value> = LazyLock::new(|| {
        let settings = SchemaSettings::draft2020_12()
            .with(|settings| settings.inline_subschemas = true)
            // No key is required, because every key has a default.
            .with_transform(RecursiveTransform(|schema: &mut Schema| {
                schema.remove("required");
                without_null(schema);
                // Remove empty defaults, which carry no information.
                if schema
                    .get("default")
                    .is_some_and(|default| default.is_null() || default.is_array() || default.is_object())
                {
                    schema.remove("default");
                }
            }));
        let mut root = settings.into_generator().into_root_schema_for::<ConfigSettings>();
        root.insert("title".to_owned(), json!("llama-warden configuration"));
        root.to_value()
    });
    &ROOT
}

/// The schema of one model's `policy`.
pub fn policy_schema() -> &'static Value {
    &root_schema()["properties"]["models"]["additionalProperties"]["properties"]["policy"]
}

/// Removes `null` from the accepted types, because TOML has no null: the key is left out instead.
fn without_null(schema: &mut Schema) {
    let Some(Value::Array(kinds)) = schema.get_mut("type") else { return };
    kinds.retain(|kind| kind != "null");
    if let [only] = kinds.as_slice() {
        let only = only.clone();
        schema.insert("type".to_owned(), only);
    }
}
