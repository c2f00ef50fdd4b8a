//! What a caller asks for: the schema's own request, made of a prompt alone, or with the rest of its fields.
//!
//! ```
//! use mlxstream::v1::{GenerateOptions, GenerateRequest};
//! use mlxstream::{chat, user};
//!
//! let options = GenerateOptions { max_tokens: Some(60), temperature: Some(0.7), ..Default::default() };
//! let request = GenerateRequest { options: Some(options), ..chat([user("Name three rivers.")]).into() };
//! ```

use crate::v1::content_part::Part;
use crate::v1::generate_request::Prompt;
use crate::v1::{ChatMessage, ChatPrompt, ContentPart, GenerateRequest, TextPrompt, TokenPrompt};

impl From<Prompt> for GenerateRequest {
    fn from(prompt: Prompt) -> Self {
        Self { prompt: Some(prompt), ..Default::default() }
    }
}

/// A prompt of raw text.
pub fn text(text: impl Into<String>) -> Prompt {
    Prompt::Text(TextPrompt { text: text.into() })
}

/// A prompt of token ids, used exactly as they are.
pub fn tokens(ids: impl IntoIterator<Item = u32>) -> Prompt {
    Prompt::Tokens(TokenPrompt { ids: ids.into_iter().collect() })
}

/// A conversation for the model's chat template; [`user`] and [`message`] make its turns. A [`ChatPrompt`] takes tools too.
pub fn chat(messages: impl IntoIterator<Item = ChatMessage>) -> Prompt {
    Prompt::Chat(ChatPrompt { messages: messages.into_iter().collect(), ..Default::default() })
}

/// A turn of the user.
pub fn user(text: impl Into<String>) -> ChatMessage {
    message("user", text)
}

/// A turn of somebody: "system", "user", "assistant", "tool", or a role that the template knows.
pub fn message(role: impl Into<String>, text: impl Into<String>) -> ChatMessage {
    ChatMessage { role: role.into(), content: vec![ContentPart { part: Some(Part::Text(text.into())) }] }
}
