//! What a caller asks for.

use crate::v1::content_part::Part;
use crate::v1::generate_request::Prompt;
use crate::v1::{
    ChatMessage, ChatPrompt, ContentPart, DeliveryOptions, GenerateOptions, GenerateRequest, TextPrompt, TokenPrompt,
};

/// A generation to ask for: a prompt, and the schema's own options.
///
/// ```
/// use mlxstream::{Request, user, v1::GenerateOptions};
///
/// let request = Request::chat([user("Name three rivers.")])
///     .options(GenerateOptions { max_tokens: Some(60), temperature: Some(0.7), ..Default::default() });
/// ```
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub(crate) message: GenerateRequest,
    pub(crate) priority: Option<i32>,
}

impl Request {
    /// Raw text.
    pub fn text(text: impl Into<String>) -> Self {
        Self::of(Prompt::Text(TextPrompt { text: text.into() }))
    }

    /// Token ids, used exactly as they are.
    pub fn tokens(ids: impl IntoIterator<Item = u32>) -> Self {
        Self::of(Prompt::Tokens(TokenPrompt { ids: ids.into_iter().collect() }))
    }

    /// A conversation for the model's chat template; [`user`] and [`message`] make its turns.
    pub fn chat(messages: impl IntoIterator<Item = ChatMessage>) -> Self {
        Self::conversation(ChatPrompt { messages: messages.into_iter().collect(), ..Default::default() })
    }

    /// A conversation with the settings of the chat template, such as tools.
    pub fn conversation(chat: ChatPrompt) -> Self {
        Self::of(Prompt::Chat(chat))
    }

    /// How to generate. What is None is the model's default.
    pub fn options(mut self, options: GenerateOptions) -> Self {
        self.message.options = Some(options);
        self
    }

    /// How to deliver. `durable` survives lost connections.
    pub fn delivery(mut self, delivery: DeliveryOptions) -> Self {
        self.message.delivery = Some(delivery);
        self
    }

    /// Name of the model; the served one by default.
    pub fn model(mut self, model: impl Into<String>) -> Self {
        self.message.model = model.into();
        self
    }

    /// The caller's own name for the generation, which `abort` takes.
    pub fn request_id(mut self, request_id: impl Into<String>) -> Self {
        self.message.request_id = request_id.into();
        self
    }

    /// From -100 to 100: higher values leave the queue first.
    pub fn priority(mut self, priority: i32) -> Self {
        self.priority = Some(priority);
        self
    }

    fn of(prompt: Prompt) -> Self {
        Self { message: GenerateRequest { prompt: Some(prompt), ..Default::default() }, priority: None }
    }
}

/// A turn of the user.
pub fn user(text: impl Into<String>) -> ChatMessage {
    message("user", text)
}

/// A turn of somebody: "system", "user", "assistant", "tool", or a role that the template knows.
pub fn message(role: impl Into<String>, text: impl Into<String>) -> ChatMessage {
    ChatMessage { role: role.into(), content: vec![ContentPart { part: Some(Part::Text(text.into())) }] }
}
